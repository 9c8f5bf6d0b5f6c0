"""What adapters that compile graphs share: plans, dynamic shapes, templates."""
