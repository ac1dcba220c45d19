//! How ranges are rounded, and that no call of the guest changes mappings of the host.

use super::*;
use crate::testing::{Machine, in_child};
use std::os::fd::AsRawFd;

const ANONYMOUS: u64 = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;

#[test]
fn ranges_round_as_the_kernel_rounds() {
    assert_eq!(pages(0x1234, 1), 0x1000..0x2000);
    assert_eq!(pages(0x1000, 0x1001), 0x1000..0x3000);
    assert!(pages(0x1000, u64::MAX).is_empty());
}

#[test]
fn a_file_that_a_descriptor_writes_is_found() {
    let status = in_child(|| {
        let path = std::env::temp_dir().join(format!("written-{}", std::process::id()));
        let write = std::fs::File::create(&path).expect("a file");
        let read = std::fs::File::open(&path).expect("the file");
        std::fs::remove_file(&path).expect("removed");
        let inode = inode_of(read.as_raw_fd()).expect("its inode");
        let found = is_written_elsewhere(inode);
        drop(write);
        let found_later = is_written_elsewhere(inode);
        i32::from((found, found_later) != (true, false))
    });
    assert_eq!(status, 0);
}

/// The host is the test's own process: no call of the guest may change its mappings.
#[test]
fn the_host_is_out_of_reach() {
    let status = in_child(|| {
        let mut m = Machine::start();
        let guest = m.result(libc::SYS_mmap, &[0, 0x4000, 3, ANONYMOUS, u64::MAX, 0]) as u64;
        let maps = space::maps().expect("maps");
        m.system.protect_host(&maps, std::slice::from_ref(&(guest..guest + 0x4000)));
        let variable = Box::new(17u64);
        let heap = page_down(std::ptr::from_ref(&*variable) as u64);
        let code = page_down(pages as *const () as u64);
        let maps = space::maps().expect("maps");
        let named = |name: &str| {
            maps.iter().find(|m| m.path.as_deref() == Some(name.as_ref())).expect("named")
        };
        let above_heap = named("[heap]").range.end + (1 << 30);
        let below_stack = named("[stack]").range.start - (4 << 20);
        let error = |errno: i32| -i64::from(errno);
        let fixed = ANONYMOUS | libc::MAP_FIXED as u64;
        let careful = ANONYMOUS | libc::MAP_FIXED_NOREPLACE as u64;
        let move_to = (libc::MREMAP_FIXED | libc::MREMAP_MAYMOVE) as u64;
        for host in [heap, code, above_heap, below_stack] {
            let mut try_it = |nr, args: &[u64]| m.result(nr, args);
            assert_eq!(
                try_it(libc::SYS_mmap, &[host, 4096, 0, fixed, u64::MAX, 0]),
                error(libc::ENOMEM)
            );
            assert_eq!(
                try_it(libc::SYS_mmap, &[host, 4096, 0, careful, u64::MAX, 0]),
                error(libc::EEXIST)
            );
            assert_eq!(try_it(libc::SYS_mprotect, &[host, 4096, 0]), error(libc::ENOMEM));
            assert_eq!(try_it(libc::SYS_madvise, &[host, 4096, 4]), error(libc::ENOMEM));
            assert_eq!(try_it(libc::SYS_mremap, &[host, 4096, 8192, 1, 0]), error(libc::EFAULT));
            assert_eq!(
                try_it(libc::SYS_mremap, &[guest, 4096, 4096, move_to, host]),
                error(libc::ENOMEM)
            );
            assert_eq!(try_it(libc::SYS_munmap, &[host, 4096]), 0, "nothing there for the guest");
            let hinted = try_it(libc::SYS_mmap, &[host, 4096, 3, ANONYMOUS, u64::MAX, 0]) as u64;
            assert!(
                !m.system.process.memory().is_protected(&(hinted..hinted + 4096)),
                "{hinted:#x} for {host:#x}"
            );
            assert_eq!(m.result(libc::SYS_munmap, &[hinted, 4096]), 0);
        }
        assert_eq!(m.result(libc::SYS_mprotect, &[guest, 0x4000, 1]), 0);
        assert_eq!(m.result(libc::SYS_munmap, &[guest, 0x4000]), 0);
        assert_eq!(*variable, 17);
        0
    });
    assert_eq!(status, 0);
}
