"""`tunemq doctor`: checks a farm for problems."""
