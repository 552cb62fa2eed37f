"""The command line: `python -m keras_freeze inspect | diff | apply | remove | verify`.

`inspect` needs neither Keras nor a backend: only `commands` imports them, when it is needed.
"""
