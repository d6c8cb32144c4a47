"""Events in order: the scheduler is told, and its actions are performed and written down."""
