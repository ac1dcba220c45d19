//! From IR to native fragments: selection, registers, encoding, code cache
