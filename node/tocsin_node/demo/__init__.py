"""`tocsin demo`: a scratch cluster that loses its leader and a worker, and is audited afterwards.

scratch.py   the folder, the processes, and what is done to them
audit.py     what is counted, from the verdict of the fault drill's judge
story.py     what happens when, and how it is told
"""
