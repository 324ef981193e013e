//! The health actor: judges what discovery found and publishes the inventory.
