"""Planted bugs: adapters with one line changed, and whether the suite notices.

`faults` reads what to plant and makes the faulty adapter, `worker` hunts for it, `campaign` keeps the worker alive and
counts.
"""
