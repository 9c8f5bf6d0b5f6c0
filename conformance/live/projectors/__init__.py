"""Projectors of libmtmd, made from a table: what they make of images and sounds, on a device and on the CPU."""
