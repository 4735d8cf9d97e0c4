"""Parts that several callbacks are made of, or that one of them would be too long with."""
