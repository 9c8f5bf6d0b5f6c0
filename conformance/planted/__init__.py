"""Planted bugs: adapters with one place changed, and whether the suite notices.

`faults` reads what to plant and makes the faulty adapter, `campaign` hunts for it in a worker and counts. `mutants`
draws faults that nobody chose, `reach` says which of them a case reaches, `difference` looks for cases that differ by
those that nothing notices, and `mutation` puts the three together.
"""
