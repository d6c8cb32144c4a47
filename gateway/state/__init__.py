"""What happens, in order: the scheduler is told, its actions are performed and written down."""
