"""Translation of command lines of other systems: a table of arguments per program, and the code that reads them."""
