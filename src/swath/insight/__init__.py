"""What a program that collects does with its time: facts, what follows from them, and what people see of it."""
