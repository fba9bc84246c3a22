"""Fine-tuning of a Hugging Face folder with no script: what `anyfit fit FOLDER --data FILE` does.

    examples.py  a file's examples: chats, instructions or text     tokens.py    these to samples: tokens, and which are answers
    packing.py   samples to rows of one length                      schedule.py  the learning rate by step
    options.py   what was asked for, as the run folder keeps it     work.py      all of these as one job with its data
    looks.py     what is looked at on the way: evaluation, the best checkpoint, samples that the model writes

It is a user of `Job` and `Run` like any other.
"""
