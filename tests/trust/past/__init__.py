"""Known bugs of old builds: how many of them the suite finds."""
