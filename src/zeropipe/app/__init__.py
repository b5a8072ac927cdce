"""The local web page: choose schedules, sizes and costs, and see at once what they do."""
