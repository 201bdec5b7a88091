"""What every process of a program did when: recorded where it happens, drawn together where it is looked at."""
