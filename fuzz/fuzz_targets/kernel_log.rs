#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| holdfast::fuzz::kernel_log(data));
