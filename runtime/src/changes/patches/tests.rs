//! Patches in fresh pages of code.

use super::*;

/// Held by tests that patch pages of files: each of these may be hidden.
pub static HIDING: Mutex<()> = Mutex::new(());

/// A fresh page of code that cannot be written.
fn page(code: &[u8]) -> u64 {
    // SAFETY: a fresh mapping, never unmapped.
    unsafe {
        let page = libc::mmap(
            std::ptr::null_mut(),
            4096,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_32BIT,
            -1,
            0,
        );
        assert_ne!(page, libc::MAP_FAILED);
        page.cast::<u8>().copy_from_nonoverlapping(code.as_ptr(), code.len());
        assert_eq!(libc::mprotect(page, 4096, libc::PROT_READ | libc::PROT_EXEC), 0);
        page as u64
    }
}

fn new(site: u64, own: [u8; LEN], inner: u8, to: u64, purpose: Purpose) -> NewPatch {
    NewPatch { purpose, end: site + LEN as u64, own, inner, to }
}

fn bytes(at: u64) -> [u8; LEN] {
    let mut bytes = [0; LEN];
    assert_eq!(memory::copy_code(at, &mut bytes), LEN);
    bytes
}

#[test]
fn a_patch_is_a_jump_until_it_is_taken_back() {
    let code = [0x90, 0xb8, 1, 0, 0, 0, 0xc3];
    let site = page(&code) + 1;
    let own = bytes(site);
    assert!(write(site, new(site, own, 0, site + 0x1000, Purpose::Trace)));
    assert_eq!(bytes(site), [0xe9, 0xfb, 0x0f, 0, 0]);
    let mut own = [0; 7];
    assert_eq!(memory::fetch_code(site - 1, &mut own), 7);
    assert_eq!(own, code);
    assert!(leads_to_trace(site) && !leads_to_trace(site + 1));
    let own = [own[1], own[2], own[3], own[4], own[5]];
    let second = new(site + 3, own, 0, site, Purpose::Call);
    assert!(!write(site + 3, second), "there is one already");
    assert!(are_in(&(site + 4..site + 5)) && !are_in(&(site + 5..site + 9)));
    assert!(take_back(&(site + 4..site + 5)).is_empty());
    assert_eq!(bytes(site), own);
    assert_eq!(trapped(site), Trapped::Passing);
    assert_eq!(trapped(site + 1), Trapped::Guest);
}

#[test]
fn a_back_edge_leads_to_the_trace_and_back() {
    // `nop; jnz` back to the `nop`; `nop; jmp` back to it.
    let conditional = [0x90, 0x0f, 0x85, 0xf9, 0xff, 0xff, 0xff, 0xc3];
    let unconditional = [0x90, 0xe9, 0xfa, 0xff, 0xff, 0xff, 0xc3, 0xc3];
    for shared in [false, true] {
        for code in [&conditional, &unconditional] {
            let head = page(code);
            let site = head + 1;
            let end = if code[1] == JCC { 7 } else { 6 };
            let own = &code[1..end];
            assert_eq!(NewPatch::of_back_edge(site, own, site).map(|new| new.to), None);
            assert!(NewPatch::of_back_edge(site, &own[1..], head).is_none());
            let new = NewPatch::of_back_edge(site, own, head).expect("it leads there");
            if shared {
                set_shared();
            }
            assert!(write(site, NewPatch { to: site + own.len() as u64 + 0x1000, ..new }));
            let mut now = [0; 8];
            assert_eq!(memory::copy_code(head, &mut now), 8);
            assert_eq!(now[..end - 4], code[..end - 4], "the opcode stays");
            assert_eq!(now[end - 4..end], 0x1000u32.to_le_bytes());
            assert_eq!(now[end..], code[end..]);
            let mut read = [0; 8];
            assert_eq!(memory::fetch_code(head, &mut read), 8);
            assert_eq!(read, *code);
            assert!(enters_trace(head) && !enters_trace(site) && !leads_to_trace(site));
            assert!(is_replaced(site + 1) && !is_replaced(site));
            take_back_from(head);
            assert!(!enters_trace(head));
            assert_eq!(memory::copy_code(head, &mut now), 8);
            assert_eq!(now, *code);
            assert_eq!(trapped(site), Trapped::Passing);
        }
    }
}

#[test]
fn a_page_stays_a_copy_while_its_patch_is_out() {
    let _alone = lock(&HIDING);
    let file = File::open("/proc/self/exe").expect("own executable");
    // SAFETY: a fresh mapping of the file's first page, never unmapped.
    let mapped = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            4096,
            libc::PROT_READ | libc::PROT_EXEC,
            libc::MAP_PRIVATE,
            std::os::fd::AsRawFd::as_raw_fd(&file),
            0,
        )
    };
    assert_ne!(mapped, libc::MAP_FAILED);
    let (page, site) = (mapped as u64, mapped as u64 + 64);
    let own = bytes(site);
    assert!(of_file(page).is_some());
    assert!(write(site, new(site, own, 0, site + 0x1000, Purpose::Trace)));
    assert!(of_file(page).is_none() && leads_to_trace(site));
    let (at, patch) = take_out(site).expect("it is there");
    assert!(at == site && take_out(site).is_none() && !leads_to_trace(site));
    assert!(of_file(page).is_none(), "it is still a copy");
    assert!(write(at, patch) && leads_to_trace(site));
    none_is_out();
    assert!(of_file(page).is_none() && leads_to_trace(site));
    assert!(take_out(site).is_some());
    none_is_out();
    assert!(of_file(page).is_some(), "it is the file's again");
    assert_eq!(bytes(site), own);
    assert!(write(at, patch) && take_out(site).is_some());
    take_back(&(page..page + 1));
    assert!(of_file(page).is_some(), "it is about to change");
}

#[test]
fn a_patch_over_several_instructions_traps_at_each() {
    // `inc eax` (2), `nop`, `ret`, `nop`: boundaries at 2, 3 and 4.
    let site = page(&[0xff, 0xc0, 0x90, 0xc3, 0x90]);
    let inner = inner_boundaries([2, 1, 1, 1]).expect("covered");
    assert_eq!(inner, 0b11100);
    assert_eq!(inner_boundaries([2, 1, 1]), None);
    let to = displacements(inner, |mask, value| {
        assert_eq!(mask, 0xffff_ff00);
        Some(site + 5 + u64::from(value | 0x12))
    });
    let to = to.expect("the first choice");
    let own = bytes(site);
    let patch = new(site, own, inner, to, Purpose::Trace);
    assert!(!write(site, NewPatch { to: to + 0x100, ..patch }), "offset 2 would not trap");
    assert!(write(site, patch));
    assert_eq!(bytes(site), [0xe9, 0x12, 0xcc, 0xcc, 0x06]);
    assert_eq!(trapped(site + 2), Trapped::Inside { start: site });
    assert_eq!(trapped(site + 1), Trapped::Guest);
    // What another writer has put there stays.
    assert!(super::super::host::write_past_protection(site + 1, &[0x77]));
    take_back(&(site..site + 1));
    assert_eq!(bytes(site), [0xff, 0x77, 0x90, 0xc3, 0x90]);
}

#[test]
fn a_patch_is_taken_back_before_displaced_bytes_behind_it_change() {
    // `xor eax, eax; syscall; cmp rax, -4096; ret`.
    let code = [0x31, 0xc0, 0x0f, 0x05, 0x48, 0x3d, 0, 0xf0, 0xff, 0xff, 0xc3];
    let site = page(&code);
    let inner = inner_boundaries([2, 2, 6]).expect("covered");
    let to = displacements(inner, |_, value| Some(site + 5 + u64::from(value)));
    let patch = NewPatch {
        purpose: Purpose::Call,
        end: site + 10,
        own: bytes(site),
        inner,
        to: to.expect("the first choice"),
    };
    assert!(write(site, patch));
    assert!(are_in(&(site + 9..site + 10)) && !are_in(&(site + 10..site + 11)));
    assert_eq!(trapped(site + 2), Trapped::Inside { start: site });
    assert_eq!(trapped(site + 4), Trapped::Inside { start: site });
    assert_eq!((trapped(site + 5), trapped(site + 9)), (Trapped::Guest, Trapped::Guest));
    assert!(take_back(&(site + 10..site + 11)).is_empty());
    assert_eq!(take_back(&(site + 9..site + 10)), [site]);
    let mut now = [0; 11];
    assert_eq!(memory::copy_code(site, &mut now), 11);
    assert_eq!(now, code);
}
