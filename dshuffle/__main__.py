"""``python -m dshuffle``: the ``dshuffle`` command of this interpreter, without a script on the path."""

from dshuffle.cli import script

if __name__ == "__main__":
    script()
