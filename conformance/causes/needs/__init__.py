"""What a failure needs: tests of a form by taking it away, and forms of failures of no single node."""
