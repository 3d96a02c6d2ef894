/* The copy that a plug-in brings along. */
const char *whose(void) { return "its own"; }
