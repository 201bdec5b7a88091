"""What other libraries need to be used: how they are imported, and started."""
