use super::*;
use crate::testing::{Machine, in_child};

const ANONYMOUS: u64 = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;

fn memory(protected: &[Range<u64>]) -> Memory {
    let mut memory = Memory::new(Brk::new(0).expect("room for a break"), 0..0);
    protected.iter().for_each(|range| memory.protect(range.clone()));
    memory
}

#[test]
fn protected_ranges_merge() {
    let memory =
        memory(&[0x5000..0x6000, 0x1000..0x2000, 0x2000..0x3000, 0x5800..0x7000, 0x9000..0x9000]);
    assert_eq!(memory.protected, [0x1000..0x3000, 0x5000..0x7000]);
    assert!(memory.is_protected(&(0x2fff..0x3000)));
    assert!(!memory.is_protected(&(0x3000..0x5000)));
    assert!(!memory.is_protected(&(0x7000..0x8000)));
}

#[test]
fn what_is_left_is_protected_no_more() {
    let mut memory = memory(&[0x1000..0x5000, 0x7000..0x9000]);
    memory.unprotect(&(0x2000..0x3000));
    memory.unprotect(&(0x6000..0x8000));
    assert_eq!(memory.protected, [0x1000..0x2000, 0x3000..0x5000, 0x8000..0x9000]);
    memory.unprotect(&(0..0x9000));
    assert!(memory.protected.is_empty());
}

#[test]
fn unmapping_spares_the_host() {
    let memory = memory(&[0x2000..0x3000, 0x5000..0x6000]);
    assert_eq!(
        memory.guest_parts(0x1000..0x7000),
        [0x1000..0x2000, 0x3000..0x5000, 0x6000..0x7000]
    );
    assert_eq!(memory.guest_parts(0x2000..0x3000), []);
    assert_eq!(memory.guest_parts(0x2800..0x4000).first(), Some(&(0x3000..0x4000)));
    assert_eq!(memory.guest_parts(0x7000..0x8000).first(), Some(&(0x7000..0x8000)));
}

#[test]
fn ranges_round_as_the_kernel_rounds() {
    assert_eq!(pages(0x1234, 1), 0x1000..0x2000);
    assert_eq!(pages(0x1000, 0x1001), 0x1000..0x3000);
    assert!(pages(0x1000, u64::MAX).is_empty());
}

#[test]
fn the_list_of_mappings_is_the_guests() {
    let mut memory = memory(&[0x1000..0x2000, 0x7000..0x9000, 0xb000..0xc000]);
    let start = memory.brk.start();
    memory.brk.set(start + 4096);
    let brk = format!("{start:x}-{:x} rw-p 00000000 00:00 0 \n", start + 4096);
    let text = format!(
        "00001000-00002000 r-xp 00000000 fe:00 1  /dynasour\n00003000-00004000 r-xp 00000000 fe:00 1  /guest\n{brk}\
         00007000-00008000 r--p 00000000 00:00 0  [vvar]\n00008000-00009000 rw-p 00000000 00:00 0 \n\
         0000a000-0000d000 rw-p 00000000 00:00 0 \n"
    );
    let shown = String::from_utf8(memory.guest_maps(text.as_bytes())).expect("text");
    let lines: Vec<_> = shown.lines().collect();
    assert_eq!(lines.len(), 5, "{shown}");
    assert_eq!(
        lines[3..],
        ["0000a000-0000b000 rw-p 00000000 00:00 0 ", "0000c000-0000d000 rw-p 00000000 00:00 0 "]
    );
    assert!(lines[0].ends_with("/guest") && lines[2].ends_with("[vvar]"), "{shown}");
    assert_eq!((lines[1].find("[heap]"), &lines[1][..20]), (Some(73), &brk[..20]));
    memory.brk.set(start);
}

/// The host of this test itself: nothing that the guest does to its addresses may reach it.
#[test]
fn the_host_is_out_of_reach() {
    let status = in_child(|| {
        let mut m = Machine::start();
        let guest = m.result(libc::SYS_mmap, &[0, 0x4000, 3, ANONYMOUS, u64::MAX, 0]) as u64;
        m.system.protect_host(std::slice::from_ref(&(guest..guest + 0x4000))).expect("maps");
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
