"""Reports of runs: reading, comparing and drawing what runs have written. Imports no torch."""
