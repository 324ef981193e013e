//! Hardware: sysfs records become devices, one file for each subject.
