"""report.html of a run: recorded steps compared with predicted ones, the loss, and a hint at what to change.

recorded_steps  measured timelines of steps, in memory and on disk
recorder        collects the recorded steps of a run and keeps the report up to date
drift           predictions of recorded steps, and the differences
hints           the largest loss of time, and the setting that is predicted to reduce it
better_layers   layers of each stage that are predicted to be faster
page            the page itself
"""
