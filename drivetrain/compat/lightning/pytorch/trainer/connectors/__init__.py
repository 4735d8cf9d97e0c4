"""Private parts of Lightning's Trainer that libraries import."""
