//! Sets the SONAME under which programs look for the driver.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    for argument in [
        // The loader answers dlopen("libcuda.so.1") with a loaded library of this SONAME.
        "-soname,libcuda.so.1",
        // Like the real driver: its own calls and `cuGetProcAddress` must resolve to its own functions, not to a preloaded
        // library's.
        "-Bsymbolic",
        // Stream threads run code of this library until the process ends.
        "-z,nodelete",
    ] {
        println!("cargo:rustc-cdylib-link-arg=-Wl,{argument}");
    }
}
