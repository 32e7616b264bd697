"""What halopipe does today, as files: whoever moves code is shown every difference, and says why it is right.

pytest tests/frozen --all-cases               everything against its file
python -m tests.frozen planning --why TEXT    files of today; TEXT is kept beside their names

``caught.md`` lists changes made by hand, and which case noticed.
"""
