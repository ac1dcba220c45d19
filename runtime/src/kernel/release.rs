//! Which Linux this is, where its behaviour towards programs has changed.

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

/// Since Linux 6.12 signal frames are written and read with the right to all protection keys, say
/// that the rights are in use even if they are initial, and `rt_sigreturn` installs the frame's
/// alternate stack before it restores the stack pointer (`arch/x86/kernel/signal_64.c`, "x86/pkeys:
/// Restore altstack access in sigreturn()").
pub fn signals_have_all_rights() -> bool {
    *RELEASE >= (6, 12)
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
