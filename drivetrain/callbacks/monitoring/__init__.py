"""Reading a logged value, and agreeing on it with the other processes."""
