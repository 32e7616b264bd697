"""Networks of other people through profile, plan and run on two workers, beside one device."""
