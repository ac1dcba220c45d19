//! The version of the running kernel, for behaviour towards programs that has changed between
//! versions. The version is read once; no lock.
//!
//! Example: on Linux 6.1 a signal frame whose stack has a denied protection key cannot be written;
//! since 6.12 it can.

use std::sync::LazyLock;

/// Major and minor number of the running kernel; zeros if its name does not begin with numbers.
static RELEASE: LazyLock<(u32, u32)> = LazyLock::new(|| {
    let name = nix::sys::utsname::uname().map(|name| name.release().to_os_string());
    parse(&name.unwrap_or_default().to_string_lossy())
});

fn parse(release: &str) -> (u32, u32) {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse().ok());
    let mut next = || numbers.next().flatten().unwrap_or(0);
    (next(), next())
}

/// Whether the kernel is Linux 6.12 or newer. Since then
/// * it writes and reads signal frames with the right to all protection keys;
/// * frames mark the rights as in use even if they are initial;
/// * `rt_sigreturn` installs the frame's alternate stack before it restores the stack pointer.
///
/// Source: `arch/x86/kernel/signal_64.c`, "x86/pkeys: Restore altstack access in sigreturn()".
pub fn signals_have_all_rights() -> bool {
    *RELEASE >= (6, 12)
}

/// Whether the kernel is Linux 5.18 or newer. Since then the SIGTRAP of an event waits while it is
/// blocked; before, it killed the process.
///
/// Source: `kernel/signal.c`, "signal: Deliver SIGTRAP on perf event asynchronously if blocked".
pub fn event_signals_wait() -> bool {
    *RELEASE >= (5, 18)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_numbers_and_more() {
        assert_eq!(parse("6.18.44-fc-v657"), (6, 18));
        assert_eq!(parse("6.1.0-56-cloud-amd64"), (6, 1));
        assert_eq!(parse("5.15-rc1"), (5, 15));
        assert_eq!(parse(""), (0, 0));
    }
}
