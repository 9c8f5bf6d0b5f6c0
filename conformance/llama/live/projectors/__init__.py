"""Projectors of libmtmd, made from a table: their encoding of images and sounds."""
