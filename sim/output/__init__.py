"""What people see of a result: report, table, pictures."""
