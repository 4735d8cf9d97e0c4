"""What tasks log: kept, reduced over an epoch and over processes."""
