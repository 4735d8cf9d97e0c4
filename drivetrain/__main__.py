"""`python -m drivetrain`, the same as the `drivetrain` command."""

from drivetrain.cli.main import main

if __name__ == "__main__":
    main()
