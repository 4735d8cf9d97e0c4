"""Parts of Lightning's Trainer that libraries import, though they are private there."""
