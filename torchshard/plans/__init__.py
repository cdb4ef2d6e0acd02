"""A plan and its forms: data, table, JSON, other libraries' plans; and the machine of its prices."""
