"""The training file: its fields, how it is read and written, and the rules that it must follow.

tables      the tables and fields of a training file (RunConfig)
fields      fields by dotted name: their types, and the rule of each in words
overrides   fields on the command line, like --mesh.pp 4
read        a file and overrides -> RunConfig, with an error line for each invalid field
write       RunConfig -> the text of a file; an example file that explains every field
rules       rules between fields, and with the model, the schedule and this machine
file_rules  rules for the files and folders that a training file names
"""
