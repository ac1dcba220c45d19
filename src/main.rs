//! The `dynasour` command.

fn main() {}
