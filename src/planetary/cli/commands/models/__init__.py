"""Commands about models and compiled steps."""
