"""What people read: tables, drawings, JSON."""
