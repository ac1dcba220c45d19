//! The guests of the matrix: one line each. `for_each_guest!` hands the lines to another macro, so that tests can be made of
//! them; [`GUESTS`] is the same as data.
//!
//! Arguments are chosen so that a run takes at most some 10 ms natively: the interpreter is up to 100 times slower, and each
//! guest runs in every mode.

use crate::build::Guest;

/// Calls `$then! { name: "source" .method(argument)…, … }` with all guests.
#[macro_export]
macro_rules! for_each_guest {
    ($then:ident) => {
        $then! {
            recursion: "recursion.c" .args(&["14"]),
        }
    };
}

macro_rules! as_data {
    ($($name:ident: $source:literal $(.$method:ident($argument:expr))*,)*) => {
        /// All guests, in the order of their declaration.
        pub const GUESTS: &[Guest] = &[$(Guest::new(stringify!($name), $source)$(.$method($argument))*,)*];
    };
}

for_each_guest!(as_data);

/// The guest with this name.
pub fn guest(name: &str) -> Option<&'static Guest> {
    GUESTS.iter().find(|guest| guest.name == name)
}
