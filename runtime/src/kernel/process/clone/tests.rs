use super::*;

#[test]
fn every_form_is_understood() {
    let fork = Request::parse(&Call::new(libc::SYS_fork, &[])).expect("valid");
    assert_eq!((fork.flags, fork.stack), (libc::SIGCHLD as u64, None));
    let vfork = Request::parse(&Call::new(libc::SYS_vfork, &[])).expect("valid");
    assert_eq!(vfork.flags, CLONE_VM | CLONE_VFORK | libc::SIGCHLD as u64);
    let clone = Call::new(libc::SYS_clone, &[CLONE_SETTLS | 17, 0x8000, 1, 2, 3]);
    let clone = Request::parse(&clone).expect("valid");
    assert_eq!((clone.stack, clone.tls), (Some(0x8000), 3));
    let mut buffer = [0; ARGS_WORDS];
    assert_eq!(
        clone.host_call(None, None, &mut buffer),
        Call::new(libc::SYS_clone, &[17, 0, 1, 2])
    );
    assert_eq!(
        clone.host_call(Some((0x1000, 0x100)), Some(5), &mut buffer),
        Call::new(libc::SYS_clone, &[CLONE_SETTLS | 17, 0x1100, 1, 2, 5])
    );
}

#[test]
fn clone3_is_checked_as_the_kernel_does() {
    let mut args = [CLONE_VM | CLONE_VFORK, 0, 0, 0, 17, 0x8000, 0x100, 7, 0, 0, 0, 0];
    let parse = |args: &[u64; 12], size: u64| {
        Request::parse(&Call::new(libc::SYS_clone3, &[args.as_ptr() as u64, size]))
    };
    let request = parse(&args, 88).expect("valid");
    assert_eq!((request.stack, request.tls), (Some(0x8100), 7));
    let mut buffer = [0; ARGS_WORDS];
    request.host_call(Some((0x1000, 0x200)), None, &mut buffer);
    assert_eq!(buffer, [CLONE_VM | CLONE_VFORK, 0, 0, 0, 17, 0x1000, 0x200, 0, 0, 0, 0]);
    assert_eq!(parse(&args, 96), Ok(request));
    assert_eq!(parse(&args, 63), Err(libc::EINVAL));
    assert_eq!(parse(&args, 5000), Err(libc::E2BIG));
    args[11] = 1;
    assert_eq!(parse(&args, 96), Err(libc::E2BIG));
    args[word::STACK_SIZE] = 0;
    assert_eq!(parse(&args, 88), Err(libc::EINVAL));
}

#[test]
fn the_child_returns_zero_on_its_own_stack() {
    let mut context = ThreadContext::new();
    (context.rip, context.gpr[4], context.fs_base) = (0x1000, 0x2000, 0x3000);
    let request = Request::parse(&Call::new(libc::SYS_clone, &[CLONE_SETTLS, 0x8000, 0, 0, 9]))
        .expect("valid");
    request.enter_child(&mut context);
    assert_eq!((context.gpr[0], context.gpr[4], context.fs_base), (0, 0x8000, 9));
    assert_eq!((context.gpr[1], context.gpr[11]), (0x1000, context.rflags));
}
