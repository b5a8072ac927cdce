"""Between ranks: connections, messages, and how one rank's failure stops all."""
