from argparse import ArgumentParser

ArgumentParser().exit(2, "error: this command has a new name: python -m tools.imitate\n")
