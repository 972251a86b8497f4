//! Signals and sudden ends of processes: what the standard library does not offer.

#![allow(unsafe_code)]

use std::process::Command;

/// Asks a process to end (SIGTERM). It may be gone already.
pub fn terminate(pid: u32) {
    // SAFETY: sends a signal, and touches no memory.
    let _ = unsafe { libc::kill(pid as libc::pid_t, libc::SIGTERM) };
}

/// Ends this process at once. Destructors and exit handlers do not run: those of a device's library
/// may wait for a device that hangs.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: the call does not return, and needs nothing of the process.
    unsafe { libc::_exit(code) }
}

/// Lets the process that `command` starts be killed when the thread that starts it ends, so that a
/// rank never outlives its launcher. Only Linux has this; elsewhere the heartbeat does it.
pub fn die_with_parent(command: &mut Command) {
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::process::CommandExt;
        let launcher = std::process::id();
        // SAFETY: between fork and exec only two system calls are made, both safe there.
        unsafe {
            command.pre_exec(move || {
                if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                    return Err(std::io::Error::last_os_error());
                }
                // The launcher may have died before the request was made.
                if libc::getppid() as u32 != launcher {
                    return Err(std::io::Error::from_raw_os_error(libc::ESRCH));
                }
                Ok(())
            });
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = command;
}

/// The name of a signal.
pub fn name(signal: i32) -> String {
    let known = [
        (libc::SIGHUP, "SIGHUP"),
        (libc::SIGINT, "SIGINT"),
        (libc::SIGQUIT, "SIGQUIT"),
        (libc::SIGILL, "SIGILL"),
        (libc::SIGTRAP, "SIGTRAP"),
        (libc::SIGABRT, "SIGABRT"),
        (libc::SIGBUS, "SIGBUS"),
        (libc::SIGFPE, "SIGFPE"),
        (libc::SIGKILL, "SIGKILL"),
        (libc::SIGSEGV, "SIGSEGV"),
        (libc::SIGPIPE, "SIGPIPE"),
        (libc::SIGTERM, "SIGTERM"),
    ];
    let name = known.iter().find(|(number, _)| *number == signal).map(|(_, name)| *name);
    name.map_or_else(|| format!("signal {signal}"), |name| format!("signal {signal}, {name}"))
}
