"""What the ranks run in tests that start Horovod."""
