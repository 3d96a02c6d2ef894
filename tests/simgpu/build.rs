//! Gives the library the name under which programs look for the driver.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    for argument in [
        // The loader takes a library of this name as the answer to dlopen("libcuda.so.1").
        "-soname,libcuda.so.1",
        // As the real driver: its own calls and the answers of cuGetProcAddress are its own
        // functions, whatever a preloaded library exports under the same names.
        "-Bsymbolic",
        // Stream workers run code of this library until the process ends.
        "-z,nodelete",
    ] {
        println!("cargo:rustc-cdylib-link-arg=-Wl,{argument}");
    }
}
