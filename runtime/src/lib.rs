//! The machine that runs: dispatcher, interpreter, deopt, system calls, signals
