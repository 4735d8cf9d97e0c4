"""Where gathered evaluation samples are kept."""
