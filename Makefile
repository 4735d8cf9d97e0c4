help:
	@echo see below
