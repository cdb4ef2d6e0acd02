"""A plan and its forms: data, table, JSON, the words of other libraries; and the machine that it is priced for."""
